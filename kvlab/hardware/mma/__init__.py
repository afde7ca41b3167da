"""Matrix instructions: atoms and their fragments, what loads them, descriptors, tensor memory."""
