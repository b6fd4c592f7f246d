"""A browser, monitoring and a proxy for tests that start whole servers."""
