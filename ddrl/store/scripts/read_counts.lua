-- Read what the append counted of entries, without their fragments; also of entries that are longer than a reply may be.
-- KEYS: 1 stream. ARGV: 1 id before them, 2 id of the last, then the names of the counts.
-- Answer: ids and the fields with their values in turn, of as many entries as 16 MB hold.
local counts, found, copied, last = {}, {}, 0, ARGV[1]
for i = 3, #ARGV do counts[ARGV[i]] = true end
repeat
  local entry = redis.call('XRANGE', KEYS[1], '(' .. last, ARGV[2], 'COUNT', 1)[1]
  if not entry then break end
  local fields = {}
  for i = 1, math.min(#entry[2], 200), 2 do
    copied = copied + #entry[2][i] + #entry[2][i + 1]
    if counts[entry[2][i]] and #entry[2][i + 1] < 20 then
      fields[#fields + 1] = entry[2][i]
      fields[#fields + 1] = entry[2][i + 1]
    end
  end
  last, found[#found + 1], found[#found + 2] = entry[1], entry[1], fields
until last == ARGV[2] or copied > 2 ^ 24
return found
