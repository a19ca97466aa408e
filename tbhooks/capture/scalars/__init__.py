"""Single numbers of a step: those the user logs, their running means, and training metrics."""
