"""The verl backend: the same experiment on verl 0.9.1, Ray and vLLM. Importing this package imports neither."""
