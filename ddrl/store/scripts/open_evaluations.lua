-- fenced
-- Open evaluations, or open them again, for anyone to play.
-- KEYS: 1 state (hash), 2 evaluating (hash). ARGV: 1 token, 2 seconds until the hash expires (0: never),
-- then id and evaluation (JSON) in turn. Answer: 1.
for i = 3, #ARGV, 2 do
  redis.call('HDEL', KEYS[2], ARGV[i] .. ':player', ARGV[i] .. ':error')
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
if ARGV[2] ~= '0' then redis.call('EXPIRE', KEYS[2], ARGV[2]) end
return 1
