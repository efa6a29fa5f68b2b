"""What is computed once for each sentence or image of a prepared set: scores, embeddings, rankings, features."""
