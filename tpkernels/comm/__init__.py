"""Process groups, how ranks agree and fail, and the transport of chunks."""
