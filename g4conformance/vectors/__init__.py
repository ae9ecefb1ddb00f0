"""Cases and traces on disk: conformance vectors, what others answer to them, and runtimes in another process."""
