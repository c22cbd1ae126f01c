"""Text to token shards (`twell_jax.prepare`), and token shards to training batches."""
