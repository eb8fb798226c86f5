-- Read a hash or a set that workers may write, and no more of it than fits. What is too long is deleted, where the caller
-- may: each look copies it. So is all of one with more members than fit, else many looks would have to clear it; who wrote
-- it does so again. A member at a time, and COPIED bytes in all, since the server has no bound for its scripts.
-- KEYS: 1 hash or set. ARGV: 1 HSCAN or SSCAN, 2 most members, 3 most bytes of them all, 4 most bytes of one.
-- Answer: fields and values in turn, or members; of more than fits any part.
local scan, width, delete = 'SSCAN', 1, 'SREM'
if ARGV[1] == 'HSCAN' then scan, width, delete = 'HSCAN', 2, 'HDEL' end
local most, most_bytes, longest = bound(ARGV[2], 50000), bound(ARGV[3], 2 ^ 25), bound(ARGV[4], 2 ^ 14)
local COPIED = 2 ^ 28
local found, bytes, copied, cursor = {}, 0, 0, '0'
repeat
  local page = redis.call(scan, KEYS[1], cursor, 'COUNT', 1)
  cursor = page[1]
  for i = 1, #page[2], width do
    local size = 0
    for j = i, i + width - 1 do size = size + #page[2][j] end
    copied = copied + size
    if size > longest then
      redis.pcall(delete, KEYS[1], page[2][i])
    else
      bytes = bytes + size
      if bytes > most_bytes then return found end
      if #found >= width * most then return type(redis.pcall('DEL', KEYS[1])) == 'number' and {} or found end
      for j = i, i + width - 1 do found[#found + 1] = page[2][j] end
    end
  end
until cursor == '0' or copied > COPIED
return found
