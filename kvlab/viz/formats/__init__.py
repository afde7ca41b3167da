"""Pictures of formats of KV caches, of transfers between them, and of audits."""
