"""The calls of the asyncio client, apart from those that submit and follow jobs: one class for each subject."""
