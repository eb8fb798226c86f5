-- Read short fields of entries, without their fragments; also of entries that are longer than a reply may be.
-- KEYS: 1 stream. ARGV: 1 id before them, 2 id of the last, 3 bytes to look at, 4 most bytes of a value, then the names.
-- Answer: ids and the fields with their values in turn, of as many entries as these bytes hold.
local names, found, copied, last = {}, {}, 0, ARGV[1]
for i = 5, #ARGV do names[ARGV[i]] = true end
repeat
  local entry, parts = first_entry('XRANGE', KEYS[1], '(' .. last, ARGV[2])
  if not entry then break end
  local fields = {}
  copied = copied + 800 + 20 * parts  -- what Lua takes for it, so that a call is short
  for i = 1, #entry[2], 2 do
    copied = copied + #entry[2][i] + #entry[2][i + 1]
    if names[entry[2][i]] and #entry[2][i + 1] <= bound(ARGV[4], 2 ^ 16) then
      fields[#fields + 1] = entry[2][i]
      fields[#fields + 1] = entry[2][i + 1]
    end
  end
  last, found[#found + 1], found[#found + 2] = entry[1], entry[1], fields
until last == ARGV[2] or copied > bound(ARGV[3], 2 ^ 23)
return found
