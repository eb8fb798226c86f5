-- Record processes that disappeared during their segments.
-- KEYS: 1 counts (hash), 2 playing (hash), 3 journal (stream). ARGV: 1 reason, 2 cap of the journal, then the processes.
-- Answer: how many of them were playing.
local num = 0
for i = 3, #ARGV do num = num + redis.call('HDEL', KEYS[2], ARGV[i]) end
if num == 0 then return 0 end
increase(KEYS[1], 'lost_producers', num)
add_capped(KEYS[3], ARGV[2], 'event', 'lost', 'reason', ARGV[1], 'producers', num)
return num
