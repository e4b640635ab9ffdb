"""sglang from outside: flags, process, HTTP client, server facts, the embedded CPU engine."""
