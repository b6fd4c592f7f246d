"""The bundled demo model, an ordinary Hugging Face folder, and the scripts that made it."""
