"""What a run would cost, and the command line that says so."""
