"""An HTTP server over any engine: SGLang's dialect, and OpenAI's for agents.

app            the application: who may ask, how large a body may be, which routes there are; and listening
answering      the way of a request of either dialect, and what is recorded of it
generate       SGLang's /generate; control, its health, information, pause and weights; sampling, the parameters
openai         /v1/chat/completions and /v1/completions: conversation, and output, of reasoning and calls (of tools)
fields         how the body of a request is declared and its mistakes are told
requests       each one on its way through the engine: streaming, stop strings, aborts, pauses
text           tokens to text, over pieces (what a token adds) and stop_strings
prompt_work    templates and tokenizing in processes of their own (prompt_worker); limits, what a request may bring
trajectory     what each call of a session sampled, to the token, in spans that its calls share
"""
