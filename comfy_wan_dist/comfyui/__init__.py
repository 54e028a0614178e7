"""All that touches ComfyUI's own modules."""
