"""The worker's core, sans-IO: what is pushed when, what is waited for, and what an update changes."""
