-- Note why an open evaluation could not be played, and free it for another player.
-- KEYS: 1 evaluating (hash). ARGV: 1 id, 2 reason. Answer: 1; 0 if the evaluation was closed.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1] .. ':player')
redis.call('HSET', KEYS[1], ARGV[1] .. ':error', ARGV[2])
return 1
