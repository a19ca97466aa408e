"""Has nothing to do with training."""

import sys
import warnings

warnings.warn("nothing to see here")
print("primes", [n for n in range(2, 60) if all(n % d for d in range(2, n))], sys.argv[1:], __name__)
