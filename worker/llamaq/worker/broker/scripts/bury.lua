-- Ends a job whose data in Redis were damaged by another client: fails it, and makes a dead letter of it.
--
-- KEYS[1]  job          hash of the job
-- KEYS[2]  events       stream of the job's events
-- KEYS[3]  stream       job stream that the job's entry was read from
-- KEYS[4]  dead         stream of dead letters
-- ARGV[1]  attempt      number of the caller's attempt; '': the job could not be claimed
-- ARGV[2]  worker       id of the caller
-- ARGV[3]  group        consumer group of the job stream
-- ARGV[4]  entry        id of the job's entry
-- ARGV[5]  channel      channel of the job's events
-- ARGV[6]  id           id of the job
-- ARGV[7]  code         error code of the job
-- ARGV[8]  reason       the error in words
-- ARGV[9]  dead_ttl_ms  shortest life of a dead job's keys, in ms
-- ARGV[10] max_dead     number of entries stored in the stream of dead letters
--
-- Returns 'ok'    the job has ended
--         'lost'  a newer attempt exists, or the job has ended

local job, events, stream, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local attempt, worker, group, entry, channel, id, code, reason, dead_ttl, max_dead = unpack(ARGV)

if redis.call('TYPE', job).ok ~= 'hash' then
  redis.call('DEL', job)
end
local status, newest, last_worker = unpack(redis.call('HMGET', job, 'status', 'attempt', 'worker'))
if has_ended(status) then
  drop_entry(stream, group, entry)
  return 'lost'
end
if attempt ~= '' and not is_newest_attempt(newest, last_worker, attempt, worker) then
  return 'lost'
end
bury(job, events, channel, stream, group, entry, dead, id, code, reason, '', dead_ttl, max_dead)
return 'ok'
