-- Record that a process could not play a run, or ended while it played. Do nothing if the run is gone.
-- KEYS: 1 state (hash), 2 journal (stream). ARGV: 1 reason, 2 cap of the journal.
-- Answer: crashes since the last fragment.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'error', ARGV[1])
redis.call('HINCRBY', KEYS[1], 'crashes_total', 1)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'event', 'crashed', 'reason', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'crashes', 1)
