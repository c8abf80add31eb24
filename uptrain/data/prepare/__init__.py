"""Tokenising of sources into a token cache: work units, quotas, worker processes and publishing."""
