"""`python -m tbhooks`: the same as the `tbhooks` command."""

import sys

from tbhooks.cli import main

sys.exit(main())
