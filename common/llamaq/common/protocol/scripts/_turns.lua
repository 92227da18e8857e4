-- Gives the tenants of a queue fair shares of the slots. This file is put in front of `_lib.lua`.
--
-- A job stream has the entries of all its jobs, in the order in which they were added. Jobs of tenants are claimed in turns:
-- the next turn belongs to the tenant with the fewest claimed jobs. If several tenants have equally few, it belongs to
-- the tenant whose last turn is longest ago. Within a tenant, the oldest entry is first. Jobs without a tenant are one
-- tenant together, whose name is ''.
--
-- An entry with the field `tenant` is claimed in a turn. Any other entry is claimed in the order of the stream. Entries
-- of jobs without a tenant have the field `tenant` only if they were added while a tenant waited. So a queue without
-- tenants has none of the keys below, and its workers only read the stream.
--
-- Keys beside the stream `jobs:PRIORITY`. They are deleted when no tenant waits and no job of a tenant is claimed:
--   turns:PRIORITY         sorted set of the tenants that wait; score: claimed jobs * CLAIMED_SCORE + number of the turn
--   turns:PRIORITY:TENANT  sorted set of the waiting entries of a tenant, in the order of the stream
--   shares:PRIORITY        hash: number of claimed jobs of each tenant that has any. A job is claimed from its turn until
--                          its entry is dropped. Further fields: '*turn', the number of the last turn, and '*waiting', the
--                          number of entries in all sorted sets `turns:PRIORITY:TENANT`

local CLAIMED_SCORE = 2 ^ 36

-- Returns the beginning of the keys of a job stream's partition, and its priority.
local function parts_of(stream)
  return string.match(stream, '^(.*:)jobs:(%a+)$')
end

-- Returns the keys of a job stream: the tenants that wait, the waiting entries of one tenant, and the shares.
local function turn_keys(stream, tenant)
  local partition, priority = parts_of(stream)
  local turns = partition .. 'turns:' .. priority
  return turns, turns .. ':' .. (tenant or ''), partition .. 'shares:' .. priority
end

-- Sets the next turn of a tenant that waits: after the tenants with fewer or equally many claimed jobs.
local function set_turn(turns, shares, tenant)
  local n_claimed = tonumber(redis.call('HGET', shares, tenant) or '0')
  local score = n_claimed * CLAIMED_SCORE + redis.call('HINCRBY', shares, '*turn', 1)
  redis.call('ZADD', turns, string.format('%.0f', score), tenant)
end

-- Lets an entry wait for a turn of its tenant.
local function wait_for_turn(stream, tenant, entry)
  local turns, line, shares = turn_keys(stream, tenant)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  local place = ms * 4096 + math.min(number, 4095) -- an exact number up to the year 2039
  if redis.call('ZADD', line, string.format('%.0f', place), entry) == 1 then
    redis.call('HINCRBY', shares, '*waiting', 1)
  end
  if not redis.call('ZSCORE', turns, tenant) then
    set_turn(turns, shares, tenant)
  end
end

-- Returns the key of the hash of a job whose entry is in a job stream.
local function job_key(stream, id)
  return parts_of(stream) .. 'job:' .. id
end

-- Returns the job id in the fields of an entry. Returns nil if there are no fields, or if they name no job: another client
-- has written the entry. `add_entry` writes {'id', id}, {'id', id, 'n', number} or {'id', id, 'tenant', tenant}.
local function job_id_in(fields)
  return fields and fields[1] == 'id' and fields[2] or nil
end

-- Returns the tenant in whose turns the entry with these fields is claimed. Returns nil if it is claimed in the order of the
-- stream.
local function tenant_in(fields)
  return fields[3] == 'tenant' and fields[4] or nil
end

-- Returns the number of the submit in the fields of an entry. Returns nil if they have none.
local function number_in(fields)
  return fields[3] == 'n' and tonumber(fields[4]) or nil
end

-- Adds the entry of a job to the end of a job stream. Returns its id, or the error of Redis if it refused the entry, and the
-- tenant in whose turns the job is claimed: nil if it is claimed in the order of the stream. The caller stores both in the
-- hash of the job. `tenant` is the tenant of the job; nil or '': none. `number` is the number of the submit, if the
-- caller is a submit. The position of a job that is claimed in the order of the stream is computed from it.
local function add_entry(stream, id, tenant, number)
  if (tenant or '') == '' then
    tenant = redis.call('EXISTS', (turn_keys(stream))) == 1 and '' or nil
  end
  if not tenant then
    if number then
      return redis.pcall('XADD', stream, '*', 'id', id, 'n', number)
    end
    return redis.pcall('XADD', stream, '*', 'id', id)
  end
  local entry = redis.pcall('XADD', stream, '*', 'id', id, 'tenant', tenant)
  if type(entry) ~= 'table' then
    wait_for_turn(stream, tenant, entry)
  end
  return entry, tenant
end

-- Drops the counters that only waiting tenants need, if no tenant waits any more.
local function drop_counters(turns, shares)
  if redis.call('EXISTS', turns) == 0 then
    redis.call('HDEL', shares, '*turn', '*waiting')
  end
end

-- Changes the number of claimed jobs of a tenant by 1 or -1.
local function count_claimed(turns, shares, tenant, by)
  local n_claimed = redis.call('HINCRBY', shares, tenant, by)
  if n_claimed <= 0 then
    redis.call('HDEL', shares, tenant)
  end
  if n_claimed >= 0 and redis.call('ZSCORE', turns, tenant) then
    redis.call('ZINCRBY', turns, string.format('%.0f', by * CLAIMED_SCORE), tenant)
  end
end

-- Removes a job from the turns of its tenant, when its entry is dropped. `tenant` is a field of the job's hash; false
-- or nil: the job was claimed in the order of the stream.
local function leave_turns(stream, tenant, entry)
  if not tenant or not entry then
    return
  end
  local turns, line, shares = turn_keys(stream, tenant)
  if redis.call('ZREM', line, entry) == 0 then
    return count_claimed(turns, shares, tenant, -1)
  end
  redis.call('HINCRBY', shares, '*waiting', -1)
  if redis.call('EXISTS', line) == 0 then
    redis.call('ZREM', turns, tenant)
    drop_counters(turns, shares)
  end
end
