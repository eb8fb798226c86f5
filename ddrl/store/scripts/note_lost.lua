-- Record a process that disappeared during its segment.
-- KEYS: 1 counts (hash), 2 playing (hash), 3 journal (stream). ARGV: 1 process, 2 reason, 3 cap of the journal.
-- Answer: 1, or 0 if the process was not playing.
if redis.call('HDEL', KEYS[2], ARGV[1]) == 0 then return 0 end
increase(KEYS[1], 'lost_producers', 1)
add_capped(KEYS[3], ARGV[3], 'event', 'lost', 'reason', ARGV[2], 'producers', 1)
return 1
