"""What runs in the training thread: hooks, the step, the recorder, and the one copy of each logged step.

Nothing here imports delivery, sinks or rules. What it captures leaves as a `PackedStep`, which becomes a `Frame`.
"""
