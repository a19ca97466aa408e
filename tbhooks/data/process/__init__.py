"""What belongs to the whole Python process: patches of other packages, torchrun's rank, remote directories, taps."""
