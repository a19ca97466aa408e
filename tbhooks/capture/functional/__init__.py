"""Functions that are no modules: softmax, attention and others, for the kind `functional`."""
