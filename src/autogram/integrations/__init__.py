"""What plugs autogram into other libraries. Each file needs its library, and nothing else does."""
