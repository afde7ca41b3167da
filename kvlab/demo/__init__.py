"""``make demo``: the KV cache of a real model, decoded by every sibling, as a table and a page."""
