"""The run folder, and the jobs that fill it."""
