"""A fake engine, so that schedulers and strategies can be tested without a model."""
