"""`python -m kvwatch`."""

from kvwatch.cli import main

if __name__ == "__main__":
    main()
