"""What tests, demo and parity runs share to drive a real ComfyUI. No part of the published pack."""
