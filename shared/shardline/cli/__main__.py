"""`python -m shardline.cli`: the same as the `shardline` command."""

from shardline.cli import main

if __name__ == "__main__":
    main()
