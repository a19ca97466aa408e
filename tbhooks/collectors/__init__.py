"""What observes logged steps besides statistics: graph, images, channels, embeddings, summary, profiler."""
