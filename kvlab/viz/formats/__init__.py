"""Pictures of KV caches at rest: formats, quantised pages, transfers, audits."""
