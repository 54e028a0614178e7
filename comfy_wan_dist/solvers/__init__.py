"""The numbers of a run: schedules and solvers. Shared with the workers."""
