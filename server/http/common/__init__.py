"""What all routes share: JSON bodies, their validation, and the document of the API."""
