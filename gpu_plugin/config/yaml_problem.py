"""What is wrong with YAML, in words that quote none of it: a file may hold passwords, and its error is logged."""


def yaml_problem(error: Exception) -> str:
    """The line and the problem of a `yaml.YAMLError`, and nothing of the text around it."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is no YAML"
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)
