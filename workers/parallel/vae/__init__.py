"""The VAE's work cut over ranks."""
