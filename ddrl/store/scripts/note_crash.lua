-- Record that a process could not play a run, or ended while it played. Do nothing if the run is gone.
-- KEYS: 1 state (hash), 2 journal (stream), 3 counts (hash). ARGV: 1 reason, 2 cap of the journal.
-- Answer: crashes since the last fragment.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[3], 'error', ARGV[1])
increase(KEYS[3], 'crashes_total', 1)
add_capped(KEYS[2], ARGV[2], 'event', 'crashed', 'reason', ARGV[1])
increase(KEYS[3], 'crashes', 1)
return number(redis.call('HGET', KEYS[3], 'crashes'))
