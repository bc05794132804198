"""A client of servers that speak OpenAI's HTTP interface: sends a list of requests on time and notes every token's."""
