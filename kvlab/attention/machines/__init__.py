"""The one room of the operations that knows architectures by name: what a GPU has, and what is emulated by what."""
