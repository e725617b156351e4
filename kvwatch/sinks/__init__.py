"""Where reports go besides stdout and the agent's own pages."""
