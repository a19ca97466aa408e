"""The public calls: `watch()`, the `Watch` handle it returns, `peek()`, and the checks of their arguments."""
