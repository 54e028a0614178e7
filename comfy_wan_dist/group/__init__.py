"""Worker groups as ComfyUI's process sees them: launch, supervise, hand over jobs, end."""
