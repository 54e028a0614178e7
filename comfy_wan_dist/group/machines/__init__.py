"""Groups that span several machines."""
