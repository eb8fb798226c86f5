-- fenced
-- Append a row of the learner's metrics.
-- KEYS: 1 state (hash), 2 metrics (stream). ARGV: 1 token, 2 cap, 3 row (JSON). Answer: the entry's id.
return redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'row', ARGV[3])
