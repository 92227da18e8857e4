"""Maps requests and answers of the OpenAI API to jobs and results of llamaq."""
