"""What ComfyUI's process imports: nodes, client and mesh. Importing it does no work."""
