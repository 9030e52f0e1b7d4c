"""Examples that run as they are; `demo` is the one to read first."""
